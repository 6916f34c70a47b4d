"""The planner: what a run costs, how fast it goes and whether it fits, before money is spent.

    shape, layout, hardware     three descriptions of arrays: one model, layout and cluster, or a million of them
    memory, steptime            bytes of the fullest GPU; seconds of a step, term by term (collectives prices traffic)
    calibration, points,        at most twelve fitted numbers per GPU type, the published measurements they rest on, and
      validate                  the error on those that no fit has seen
    estimate, search, torun     one answer with an error bar; the best of all layouts; the winner as a `spec.Run`
    economics, prices, rates    GPUs for a deadline and the reverse, reserves, money
    goodput, failures           what failures leave of the time
    hall                        how many GPUs a data hall holds
    audit                       an article's claims, recomputed

Every answer is simulated and says so. Lives without torch; numpy does the work, scipy only fits, matplotlib only draws.
"""
