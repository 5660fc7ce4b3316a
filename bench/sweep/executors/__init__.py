"""Where else than on this machine a sweep's cells can run; see :class:`Executor`."""
