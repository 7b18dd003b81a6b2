#include "common/epilogue.h"

#include "common/exponential.h"

Vec silu(Vec y) { return y / (1 + exponential(-y)); }

void apply(const Epilogue& epilogue, Elements there, float* row, int count) {
  const Elements added = epilogue.beside(there);
  for (int i = 0; i < count; i += VL) {
    const Vec value = load_first(row + i, count - i);
    store_first(row + i, epilogue.activated(added ? value + load_first(added + i, count - i) : value), count - i);
  }
}

void apply(const Epilogue& epilogue, const Images& y, const Region& region, const Window& window) {
  constexpr int PIECE = 32;  // columns at a time; the buffer holds their addends
  alignas(64) float buffer[PIECE * VL];
  Images added = y;
  added.data = epilogue.beside(y.data);
  for (int i = 0; i < region.rows; ++i)
    for (int j = 0; j < region.columns; j += PIECE) {
      const int columns = std::min(PIECE, region.columns - j);
      const Region part{region.image, region.channel, region.top + i, region.left + j, 1, columns};
      float* at = window.data + i * window.row + j * window.column;
      const Window addends = added.data ? gather(added, part, buffer) : Window{};
      for (int column = 0; column < columns; ++column, at += window.column) {
        const Vec value = load(at);
        store(at, epilogue.activated(added.data ? value + load(addends.data + column * addends.column) : value));
      }
    }
}
