"""Interchange: reading what serving engines and trainers record, writing the placements that they accept.

A **source** is a file or folder from outside. What it holds comes as **pieces** (tokens with their experts, one file
or record at a time, never the whole) or as **counts**. `assemble` checks pieces against each other and makes chunks of
one `RoutingTrace` of them; **notes** say what was read, what was dropped and why, and what the source cannot give.
"""
