"""`ringtrue audit`: the command, the processes it runs in, and what it shows."""
