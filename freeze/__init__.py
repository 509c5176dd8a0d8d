"""How nvplug becomes one static executable: bundle.py for build.spec, and what goes into it."""
