"""The performance lane: how fast an implementation is, against what, and whether that can be believed.

From the inside out: `work` (operations and bytes of a case), `devices` (peaks), `interval` (what repeated samples
decide), `thresholds`; then, with torch, `clock`, `subject` (one implementation ready to be timed), `pairing` (two of
them taking turns), `verification` (the timed outputs), `trials` (the verdicts). `lane` is pytest's rim, `compare` and
`memory` are commands.
"""
