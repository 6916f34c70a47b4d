// Products of tokens with stored matrices, shared between threads.
#pragma once

#include <vector>

#include "kernels.h"
#include "lakh_engine.h"

namespace lakh {

// A matrix and the tokens that it multiplies.
struct Factor {
  const lakh_engine_piece* pieces;
  int64_t num_pieces;
  Range tokens;
  int64_t expert = 0;  // of matrices that are stored one after the other
};

// Whether the format has kernels for this number of columns.
bool is_known(const lakh_engine_piece& piece, int64_t columns);

// y[n] = x[n] times the matrix of its factor, for `num` tokens. All matrices have as many rows. False for an unknown format.
bool multiply(const std::vector<Factor>& factors, int64_t columns, const float* x, int64_t num, float* y);

inline int64_t rows_of(const lakh_engine_matrices& matrices) {
  int64_t rows = 0;
  for (int64_t i = 0; i < matrices.num_pieces; ++i) rows += matrices.pieces[i].rows;
  return rows;
}

}  // namespace lakh
