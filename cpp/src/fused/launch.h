// The argument of the row kernels' launch functions, for the registry.
#pragma once

#include "fused/row_params.h"
#include "minfer/status.h"
