"""Side-by-side measurements that anyone can repeat: what the training step costs, beside peers and the machine."""
