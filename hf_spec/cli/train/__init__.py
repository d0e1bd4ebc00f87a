"""`hf-spec train` and `hf-spec calibrate`: one file each."""
