"""What kind of wrong a failed check shows, in a sentence or two. See docs/diagnosis.md.

    notebook      what a check's calls received and returned; opened by `trial`, light to import
    explain       from a failure to lines: explain_output, explain_gradient, in the order of docs/diagnosis.md
    failure       one failure and its samples; budget: how long it may take
    model         one problem in float64 whose parts can be replaced; backward_model: its gradients
    forward_…     tables of alternatives, wrong ways to compute o, each with its sentence; forward: trying them
    lse, backward_…  the same for the log-sum-exp and for gradients
    match         does an alternative match what was returned, and how tightly
    fits          alternatives with a number in them that is fitted
    history       what earlier calls say; experiments: the same call again, with one thing made harmless
    rounding      an emulator with one rounding too many
    shape         factors, zeros, NaN, tails

A diagnosis never changes a verdict and never raises.
"""
