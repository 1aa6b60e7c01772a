"""Several ranks: threads of one process, processes, hosts."""
