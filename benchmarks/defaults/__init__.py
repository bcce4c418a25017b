"""How good lapwing's defaults are: a grid of trained networks, a few arms on each, and the aims they are judged by."""
