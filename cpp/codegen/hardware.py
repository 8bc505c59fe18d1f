"""What kernels are budgeted for, by architecture."""

from __future__ import annotations

SM90_SMEM_LIMIT = 232448  # 227 KiB: what one block can opt in to on compute capability 9.0
SM90_SMEM_LIMITS = {
    1: SM90_SMEM_LIMIT,
    2: 115712,
    3: 76800,
}  # by CTAs to an SM; 113 and 75 KiB: the CTAs and the 1 KiB that the system takes for each share 228
SM80_SMEM_LIMIT = 101376  # 99 KiB: the smallest opt-in limit from sm_80 on (8.6, 8.9 and 12.0 have it)
SM_REGISTERS = 65536
SM90_BARRIER_BYTES = 512
SM90_SMEM_ALIGNMENT = 1024  # of the whole: swizzle patterns count from here
MIN_STAGES_SM90, MAX_STAGES_SM90 = 3, 16
SWIZZLE_ROW_BYTES = 128  # a row of a K tile in shared memory is whole ones of these


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
