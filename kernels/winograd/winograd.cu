// The transforms of Winograd convolution, F(M x M, R x R). The products over channels are left to a library.
//
// cuda_source.py prepends: T (the element type of tensors), Real (the type of arithmetic), CHANNELS_LAST, THREADS (per
// block), M, R, A = M + R - 1, and the matrices B_T, A_T, DY, G, TURNED_G and G_T, each with an unrolled
// apply(in, out).
//
// Transformed tiles are stored in A x A planes, one per point. For each group, a plane holds (channels, tiles) if
// images are contiguous, and (tiles, channels) if they are channels-last; transformed filters are stored in planes of
// (filters, channels). A thread handles one tile or filter, which is element i of every plane. So neighbouring threads
// access neighbouring elements of the planes, and the same cache lines of the image. Tiles stay in registers, and
// threads share no data.

using Index = unsigned;    // within a plane: below 2^31
using Offset = long long;  // within a tensor

// An image batch and its division into tiles (see Tiling in tiling.py). channels: of all groups.
struct Images {
  Index channels, group_channels, tiles, rows, columns;
  int height, width, top, left;

  __device__ __forceinline__ Index plane() const { return channels * tiles; }
  __device__ __forceinline__ Offset row_stride() const { return CHANNELS_LAST ? Offset(width) * channels : width; }
  __device__ __forceinline__ Offset column_stride() const { return CHANNELS_LAST ? channels : 1; }
};

// count: filters times their channels.
struct Filters {
  Index count, channels;

  __device__ __forceinline__ Offset tap_stride() const { return CHANNELS_LAST ? channels : 1; }
  // Return the offset of the first tap of element i of a plane.
  __device__ __forceinline__ Offset taps(Index i) const {
    return CHANNELS_LAST ? Offset(i / channels) * (R * R) * channels + i % channels : Offset(i) * (R * R);
  }
};

// pixels: offset of the first pixel of its sample and channel; y, x: its first target pixel.
struct Tile {
  Index channel;
  int y, x;
  Offset pixels;
};

__device__ __forceinline__ Index thread_number() { return blockIdx.x * Index(THREADS) + threadIdx.x; }

// Return the tile that is element i of every plane.
__device__ __forceinline__ Tile tile_at(Index i, const Images& images) {
  Index channel, tile;
  if (CHANNELS_LAST) {
    const Index tile_of_group = i / images.group_channels, group = tile_of_group / images.tiles;
    tile = tile_of_group % images.tiles;
    channel = group * images.group_channels + i % images.group_channels;
  } else {
    tile = i % images.tiles;
    channel = i / images.tiles;
  }
  const Index row_of_batch = tile / images.columns, sample = row_of_batch / images.rows;
  const Offset size = Offset(images.height) * images.width;
  const Offset pixels = CHANNELS_LAST ? sample * size * images.channels + channel
                                      : (Offset(sample) * images.channels + channel) * size;
  return {channel, int(row_of_batch % images.rows) * M, int(tile % images.columns) * M, pixels};
}

// Store Matrix half^T as element i of all planes: the second half of Matrix tile Matrix^T.
template <class Matrix>
__device__ __forceinline__ void store_points(const Real (&half)[Matrix::COLUMNS][A], Real* planes, Index plane,
                                             Index i) {
#pragma unroll
  for (int q = 0; q < A; ++q) {
    Real column[Matrix::COLUMNS], points[A];
#pragma unroll
    for (int y = 0; y < Matrix::COLUMNS; ++y) column[y] = half[y][q];
    Matrix::apply(column, points);
#pragma unroll
    for (int p = 0; p < A; ++p) planes[Offset(p * A + q) * plane + i] = points[p];
  }
}

// Compute half = Matrix points, from element i of all planes: the first half of Matrix points Matrix^T.
template <class Matrix>
__device__ __forceinline__ void load_points(const Real* planes, Index plane, Index i, Real (&half)[Matrix::ROWS][A]) {
#pragma unroll
  for (int q = 0; q < A; ++q) {
    Real points[A], column[Matrix::ROWS];
#pragma unroll
    for (int p = 0; p < A; ++p) points[p] = planes[Offset(p * A + q) * plane + i];
    Matrix::apply(points, column);
#pragma unroll
    for (int y = 0; y < Matrix::ROWS; ++y) half[y][q] = column[y];
  }
}

// Compute planes = Matrix tile Matrix^T for every tile; pixels outside the image are zero.
template <class Matrix>
__device__ __forceinline__ void transform_tiles(const T* image, Real* planes, const Images& images) {
  const Index i = thread_number();
  if (i >= images.plane()) return;
  const Tile tile = tile_at(i, images);
  const int top = tile.y - images.top, left = tile.x - images.left;
  Real half[Matrix::COLUMNS][A];
#pragma unroll
  for (int y = 0; y < Matrix::COLUMNS; ++y) {
    const bool inside = unsigned(top + y) < unsigned(images.height);
    const Offset row = tile.pixels + (top + y) * images.row_stride();
    Real pixels[Matrix::COLUMNS];
#pragma unroll
    for (int x = 0; x < Matrix::COLUMNS; ++x)
      pixels[x] = inside && unsigned(left + x) < unsigned(images.width)
                      ? widened(image[row + (left + x) * images.column_stride()])
                      : Real(0);
    Matrix::apply(pixels, half[y]);
  }
  store_points<Matrix>(half, planes, images.plane(), i);
}

// Compute planes = Matrix filter Matrix^T for every filter and channel.
template <class Matrix>
__device__ __forceinline__ void transform_filters(const T* w, Real* planes, const Filters& filters) {
  const Index i = thread_number();
  if (i >= filters.count) return;
  const T* taps = w + filters.taps(i);
  Real half[R][A];
#pragma unroll
  for (int y = 0; y < R; ++y) {
    Real row[R];
#pragma unroll
    for (int x = 0; x < R; ++x) row[x] = widened(taps[(y * R + x) * filters.tap_stride()]);
    Matrix::apply(row, half[y]);
  }
  store_points<Matrix>(half, planes, filters.count, i);
}

// Neighbouring pixels that are stored at once, at most 16 bytes.
constexpr int PIECE = M % 4 == 0 && sizeof(T) <= 4 ? 4 : 2;
struct alignas(PIECE * sizeof(T)) Piece {
  T pixels[PIECE];
};

// Store the first `count` of the M pixels of a row.
__device__ __forceinline__ void store_row(const Real (&values)[M], int count, T* row, Offset column_stride) {
  if (!CHANNELS_LAST && count >= M && reinterpret_cast<unsigned long long>(row) % sizeof(Piece) == 0) {
#pragma unroll
    for (int x = 0; x < M; x += PIECE) {
      Piece piece;
#pragma unroll
      for (int j = 0; j < PIECE; ++j) narrow(values[x + j], piece.pixels[j]);
      *reinterpret_cast<Piece*>(row + x) = piece;
    }
  } else {
#pragma unroll
    for (int x = 0; x < M; ++x)
      if (x < count) narrow(values[x], row[x * column_stride]);
  }
}

#define FUNCTION extern "C" __global__ void __launch_bounds__(THREADS)

FUNCTION transform_source(const T* image, Real* planes, Images images) { transform_tiles<B_T>(image, planes, images); }

FUNCTION transform_gradient(const T* dy, Real* planes, Images images) { transform_tiles<DY>(dy, planes, images); }

// Compute image = A_T points A + bias. bias: one for each channel, or null.
FUNCTION inverse_transform(const Real* planes, const T* bias, T* image, Images images) {
  const Index i = thread_number();
  if (i >= images.plane()) return;
  Real half[M][A];
  load_points<A_T>(planes, images.plane(), i, half);
  const Tile tile = tile_at(i, images);
  const Real start = bias ? widened(bias[tile.channel]) : Real(0);
#pragma unroll
  for (int y = 0; y < M; ++y) {
    Real pixels[M];
    A_T::apply(half[y], pixels);
#pragma unroll
    for (int x = 0; x < M; ++x) pixels[x] += start;
    T* row = image + tile.pixels + (tile.y + y) * images.row_stride() + tile.x * images.column_stride();
    if (tile.y + y < images.height) store_row(pixels, images.width - tile.x, row, images.column_stride());
  }
}

FUNCTION transform_filter(const T* w, Real* planes, Filters filters) { transform_filters<G>(w, planes, filters); }

// Transform the filter turned by 180 degrees.
FUNCTION transform_turned_filter(const T* w, Real* planes, Filters filters) {
  transform_filters<TURNED_G>(w, planes, filters);
}

// Add G_T points G to w.
FUNCTION add_filter_gradient(const Real* planes, T* w, Filters filters) {
  const Index i = thread_number();
  if (i >= filters.count) return;
  Real half[R][A];
  load_points<G_T>(planes, filters.count, i, half);
  T* taps = w + filters.taps(i);
#pragma unroll
  for (int y = 0; y < R; ++y) {
    Real gradient[R];
    G_T::apply(half[y], gradient);
#pragma unroll
    for (int x = 0; x < R; ++x) {
      T& tap = taps[(y * R + x) * filters.tap_stride()];
      narrow(widened(tap) + gradient[x], tap);
    }
  }
}
