"""A real server: starting one, driving a drain through it, watching it, reading it out, and what can be done about a wedged one."""
