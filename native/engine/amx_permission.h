// Whether this process may use AMX tiles.
#pragma once

namespace lakh {

// The CPU has tiles and their products of 8-bit integers, and Linux permits their use: it saves 8 KiB more for each thread
// that uses them, so a process asks once. False on a kernel before 5.16, and where a filter of system calls refuses.
bool has_amx_permission();

}  // namespace lakh
