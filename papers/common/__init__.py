"""What the experiments share: data, networks, training, scores, results and pictures."""
