"""What runs centrally: decides who sends what to whom; data never passes through it."""
