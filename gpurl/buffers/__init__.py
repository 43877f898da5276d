"""Buffers: rollouts, replay buffers and demonstrations to train on."""
