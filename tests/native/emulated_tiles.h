// The tile instructions of AMX in portable C++, for tests on CPUs without them: palette 1, and the semantics and faults of
// Intel's Software Developer's Manual (volume 2: LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBSSD). What
// faults there ends the program with its reason. A thread that configures tiles without having released them ends it, too.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace emulated_tiles {

constexpr int kTiles = 8, kMaxRows = 16, kMaxRowBytes = 64;  // of palette 1

struct Tile {
  int rows, row_bytes;
  uint8_t bytes[kMaxRows][kMaxRowBytes];  // zeros beyond the configured rows and bytes
};

struct Tiles {
  bool is_configured;
  Tile tiles[kTiles];

  ~Tiles();
};

inline void require(bool is_met, const char* reason) {
  if (is_met) return;
  fprintf(stderr, "emulated tiles: %s\n", reason);
  abort();
}

inline Tiles::~Tiles() { require(!is_configured, "a thread ends without having released its tiles"); }

inline thread_local Tiles state = {};

inline Tile& tile(int number) {
  require(state.is_configured, "an instruction before LDTILECFG (#UD)");
  require(number >= 0 && number < kTiles, "no such tile (#UD)");
  Tile& found = state.tiles[number];
  require(found.rows > 0 && found.row_bytes > 0, "a tile without a shape (#UD)");
  return found;
}

inline void load_config(const void* from) {
  uint8_t bytes[64];
  memcpy(bytes, from, sizeof bytes);
  require(!state.is_configured, "tiles are configured again before they are released");
  require(bytes[0] == 1, "a palette other than 1 (#GP)");
  require(bytes[1] == 0, "start_row is not 0");  // allowed by LDTILECFG, but the next loads would begin there
  for (int i = 2; i < 16; ++i) require(bytes[i] == 0, "a reserved byte is not 0 (#GP)");
  for (int i = 16 + 2 * kTiles; i < 48; ++i) require(bytes[i] == 0, "bytes in a row of a tile beyond 7 (#GP)");
  for (int i = 48 + kTiles; i < 64; ++i) require(bytes[i] == 0, "rows of a tile beyond 7 (#GP)");
  memset(&state.tiles, 0, sizeof state.tiles);
  for (int i = 0; i < kTiles; ++i) {
    const int row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, rows = bytes[48 + i];
    require(row_bytes <= kMaxRowBytes && rows <= kMaxRows, "a tile is too large (#GP)");
    require((row_bytes == 0) == (rows == 0), "a tile has rows without bytes, or bytes without rows (#GP)");
    state.tiles[i].rows = rows, state.tiles[i].row_bytes = row_bytes;
  }
  state.is_configured = true;
}

inline void release() {
  memset(&state.tiles, 0, sizeof state.tiles);
  state.is_configured = false;
}

inline void zero(int to) {
  Tile& found = tile(to);
  memset(found.bytes, 0, sizeof found.bytes);
}

inline void load(int to, const void* base, int64_t stride) {
  Tile& found = tile(to);
  memset(found.bytes, 0, sizeof found.bytes);
  for (int row = 0; row < found.rows; ++row) {
    memcpy(found.bytes[row], static_cast<const uint8_t*>(base) + row * stride, found.row_bytes);
  }
}

inline void store(int from, void* base, int64_t stride) {
  const Tile& found = tile(from);
  for (int row = 0; row < found.rows; ++row) {
    memcpy(static_cast<uint8_t*>(base) + row * stride, found.bytes[row], found.row_bytes);
  }
}

// to[m][n] += the sum over k and 4 bytes of first[m][k] * second[k][n], signed.
inline void add_signed_products(int to, int first, int second) {
  Tile &sums = tile(to), &a = tile(first), &b = tile(second);
  require(to != first && to != second && first != second, "a tile is named twice (#UD)");
  require(sums.row_bytes % 4 == 0 && a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0, "bytes that are no quads (#UD)");
  require(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes / 4 == b.rows, "shapes differ (#UD)");
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      int32_t sum;
      memcpy(&sum, sums.bytes[m] + 4 * n, sizeof sum);
      for (int k = 0; k < b.rows; ++k) {
        for (int i = 0; i < 4; ++i) sum += int8_t(a.bytes[m][4 * k + i]) * int8_t(b.bytes[k][4 * n + i]);
      }
      memcpy(sums.bytes[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

}  // namespace emulated_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated_tiles::load_config(from)
#define _tile_release() emulated_tiles::release()
#define _tile_zero(to) emulated_tiles::zero(to)
#define _tile_loadd(to, base, stride) emulated_tiles::load(to, base, stride)
#define _tile_stored(from, base, stride) emulated_tiles::store(from, base, stride)
#define _tile_dpbssd(to, first, second) emulated_tiles::add_signed_products(to, first, second)
