"""What watches an iteration: the form of steps, NaN and infinity, optimiser steps."""
