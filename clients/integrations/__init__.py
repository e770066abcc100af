"""What joins deltabus to the libraries that people train with; each module needs its library installed."""
