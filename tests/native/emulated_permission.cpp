// In place of amx_permission.cpp where tiles are emulated.
#include "amx_permission.h"

bool lakh::has_amx_permission() { return true; }
