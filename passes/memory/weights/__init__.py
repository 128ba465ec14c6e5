"""Weights and gradients in another memory space, while a rank computes with others.

elsewhere  their homes and moves, in schedules that run one batch after the other
versions   the same of two versions, in schedules that begin a batch before the last one ends
gradients  gradients, which come as zeros
stays      behind which visits weights stay until the next one
room       weights of as many stages on a device as its memory has room for
"""
