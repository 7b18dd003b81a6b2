#include "common/epilogue.h"

#include "common/exponential.h"

Vec silu(Vec y) { return silu_inlined(y); }

// Call body(activated) with the function that follows the addition.
template <class Body>
static void with_activation(const Epilogue& epilogue, Body body) {
  if (epilogue.activation == SILU) return body([](Vec value) INLINE_LAMBDA { return silu_inlined(value); });
  body([&](Vec value) INLINE_LAMBDA { return epilogue.activated(value); });
}

void apply(const Epilogue& epilogue, Elements there, float* row, int count) {
  const Elements added = epilogue.beside(there);
  with_activation(epilogue, [&](auto activated) {
    const auto apply_to = [&](int i, int lanes) INLINE_LAMBDA {
      const Vec value = load_first(row + i, lanes);
      store_first(row + i, activated(added ? value + load_first(added + i, lanes) : value), lanes);
    };
    const int whole = count / VL * VL;
    for (int i = 0; i < whole; i += VL) apply_to(i, VL);
    if (whole < count) apply_to(whole, count - whole);
  });
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
      with_activation(epilogue, [&](auto activated) {
        for (int column = 0; column < columns; ++column, at += window.column) {
          const Vec value = load(at);
          store(at, activated(added.data ? value + load(addends.data + column * addends.column) : value));
        }
      });
    }
}
