"""What a role tells about itself: metrics, how busy it was, and its log."""
