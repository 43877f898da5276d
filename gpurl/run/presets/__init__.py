"""Settings that train an environment well, found by runs of this program; settings from files and
the command line win over them.
"""
