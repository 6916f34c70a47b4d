"""The planner: memory, step time and cost of a run before it starts, on hardware described as data.

    execution_plan, stacked     one plan or arrays of candidates; many models or clusters seen as one
    memory, timing/             bytes on the fullest GPU; seconds of a step, term by term
    estimate, search/           one plan with its error bar; the best of all plans
    catalogue, request          published models; what a command asks for
    calibration/                published measurements and the efficiencies fitted to them
    validation/                 prediction error, cross-validation, audit of an article's claims
    cost/, reliability/         GPUs, days and dollars; failures and goodput
    facility/                   how many GPUs a data hall holds
    interchange/                files of other simulators: Chakra traces, InfraGraph networks

It works on the same `spec.Model`, `spec.Mesh` and `spec.Cluster` that training uses. Every answer is simulated and says
so. Independent of torch; numpy does the work, scipy only fits, matplotlib only draws.
"""
