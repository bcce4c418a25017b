"""The grid of trained networks by which lapwing's defaults are judged: cells, arms, measures and aims."""
