"""The demo: traffic, a server process, stages that resume, and a report. Start at `run`."""
