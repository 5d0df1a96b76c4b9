"""How much the suite catches: every mutant against every case, and against the rules of other projects."""
