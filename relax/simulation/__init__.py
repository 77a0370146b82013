"""What a run without a model is made of: how long a sample becomes, and how long things take."""
