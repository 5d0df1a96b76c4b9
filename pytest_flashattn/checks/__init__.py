"""The checks: one module a chapter, each check a plain function that returns a Verdict and needs no pytest."""
