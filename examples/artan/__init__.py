"""What the guides of Artan show, as specs of this project: see docs/artan.md."""
