#!/bin/sh
exec /usr/bin/p2pdist slurm prolog --tracker http://tracker:7070 2>>/var/log/p2pdist-slurm.log
