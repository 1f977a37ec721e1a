"""CPUs, memory, clock and operating system of this machine."""
