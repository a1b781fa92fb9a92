"""Watch a run, a sweep, a swarm or nodes while they run: a page on 127.0.0.1, or a table in the terminal.

    run folder --> LinesFile, JsonFile --> RunSource  --+--> Hub --> http server --> page/ (server-sent events)
    nodes      --> their status        --> NodeSource --+--> terminal

Everything here only reads: no lock is taken, no file is written, and nothing of the folder is trusted.
"""
