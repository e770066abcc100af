import os

from hypothesis import settings

# The first call of a compiled loop takes seconds, and a busy machine any time: the limit is pytest's, for a whole test.
# EXAMPLES=1000 looks longer for what breaks a property; each run looks elsewhere.
settings.register_profile("deltabus", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "40")))
settings.load_profile("deltabus")
