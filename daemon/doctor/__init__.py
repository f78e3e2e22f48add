"""What `quantd doctor` looks at, one file for each kind of thing; none of it needs a daemon."""
