"""Training across sites: placement, schedule and network searched together.

sites         the sites file: GPUs of each site, and the links between sites
placements    which axis crosses which link: pipelines through several sites, replicas in others
network       routing, queue pairs, transport and wavelengths, and the share of a link that each reaches
layout_rows   all layouts and schedules of one pipeline depth, as arrays
site_work     seconds and bytes of a layout inside one site
crossing      seconds that links between sites add
joint_search  exhaustive search, finalists through timelines and the fabric
"""
