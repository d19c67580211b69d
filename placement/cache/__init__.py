"""Which experts stay in the GPU's slots: eviction policies, arenas, and Belady's optimum to judge them by.

A *lookup* is one expert that one MoE layer needs in one step (experts that several tokens of a step share count once).
A *slot* holds one expert; an *arena* is a set of slots that some layers share (one for all layers, or one a layer).
A policy gives each expert a value after every layer; the expert of least value makes room. All is pure and compiled;
`workers/slot_cache.py` runs the very functions that `simulate.py` scores.
"""
