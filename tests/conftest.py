from hypothesis import settings

# The first call of a compiled loop takes seconds, and a busy machine any time: the limit is pytest's, for a whole test.
settings.register_profile("deltabus", deadline=None)
settings.load_profile("deltabus")
