"""The FP8 forward for Hopper, from the parts of ../../hopper: read those first.

    scales          what the stored numbers are worth, and V's channel, whose tiles are columns
    interleaving    the order of V's keys in which P need not change registers
    operand         P from the registers of a result into those of an FP8 operand
    consumer        the loop over the keys in FP8
    kernel          the roles, and what they share

The producer's loop, the channels, masks, tile lists and inline PTX are ../../hopper's. Around the files above `configs`
(tiles), `launch` (the function) and `cases` (for the compile lane).

Importing the package imports neither torch nor Triton.
"""
