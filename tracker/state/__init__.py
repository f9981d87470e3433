"""What must outlive a tracker. Swarms are not among it: agents bring them back."""
