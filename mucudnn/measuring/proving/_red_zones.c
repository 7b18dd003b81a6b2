/* Red zones around the aligned allocations of a process that preloads this library (LD_PRELOAD).

PyTorch and oneDNN allocate tensors and scratchpads with posix_memalign. Each such block is placed between two zones
filled with a pattern, and is itself filled with NaN. The zones are checked when the block is freed, and by
red_zones_check(): a write outside a block ends the process with a line on standard error. Blocks from malloc are
guarded by glibc's own heap checks (MALLOC_CHECK_). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __x86_64__
#define FIRST_VERSION "GLIBC_2.2.5"
#else
#define FIRST_VERSION "GLIBC_2.17" /* aarch64 */
#endif
#define EXPORTED __attribute__((visibility("default")))

enum { PATTERN = 0xA5, GARBAGE = 0xFF, LEAST_ZONE = 4096, MOST_ZONE = 1 << 16, ALIGNMENT = 64 };
enum { ENTRIES = 1 << 15 }; /* slots, a power of two; once half are used, new blocks get no zones */

typedef struct {
  unsigned char *block; /* NULL if the slot is free, TOMBSTONE if its block was freed */
  unsigned char *base;
  size_t size, behind; /* bytes of the block and of the zone behind it; the zone before it begins at base */
  size_t serial;       /* number of the block, in order of allocation */
} Entry;

static unsigned char tombstone;
#define TOMBSTONE (&tombstone)
static Entry table[ENTRIES];
static size_t live, last_serial, serial_of_whole_check;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*next_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);
static void *(*next_realloc)(void *, size_t);
static size_t (*next_usable_size)(void *);

/* Return a function of the next library in the search order. The symbols of libc_malloc_debug have a version that is
not the default one, so that dlsym does not find them. */
static void *next(const char *name) {
  void *found = dlvsym(RTLD_NEXT, name, FIRST_VERSION);
  return found != NULL ? found : dlsym(RTLD_NEXT, name);
}

static void resolve(void) {
  static int resolving;
  if (next_free != NULL || resolving) return;
  resolving = 1;
  next_memalign = (int (*)(void **, size_t, size_t))next("posix_memalign");
  next_realloc = (void *(*)(void *, size_t))next("realloc");
  next_usable_size = (size_t (*)(void *))next("malloc_usable_size");
  next_free = (void (*)(void *))next("free");
  resolving = 0;
}

static size_t slot_of(const void *block) { return ((uintptr_t)block / ALIGNMENT * 0x9E3779B97F4A7C15u) >> 49; }

/* Return the entry of a block, or NULL. The caller holds the lock. */
static Entry *find(const void *block) {
  for (size_t i = 0, slot = slot_of(block); i < ENTRIES && table[slot].block != NULL; i++, slot = (slot + 1) % ENTRIES)
    if (table[slot].block == block) return &table[slot];
  return NULL;
}

static void end_process(const Entry *entry, const unsigned char *written) {
  char line[160];
  long before = (long)(entry->block - written), behind = (long)(written - (entry->block + entry->size)) + 1;
  int length = snprintf(line, sizeof line, "it writes %ld bytes %s a block of %zu bytes\n", before > 0 ? before : behind,
                        before > 0 ? "before" : "behind", entry->size);
  if (write(STDERR_FILENO, line, (size_t)length) < 0) abort();
  abort();
}

static int is_untouched(const unsigned char *zone, size_t size) {
  return size == 0 || (zone[0] == PATTERN && memcmp(zone, zone + 1, size - 1) == 0);
}

static void check(const Entry *entry) {
  const unsigned char *end = entry->block + entry->size;
  if (!is_untouched(entry->base, (size_t)(entry->block - entry->base)))
    for (const unsigned char *p = entry->base; p < entry->block; p++)
      if (*p != PATTERN) end_process(entry, p);
  if (!is_untouched(end, entry->behind))
    for (const unsigned char *p = end + entry->behind; p-- > end;)
      if (*p != PATTERN) end_process(entry, p);
}

/* Check all blocks, or only those allocated since the last check of all, since libraries cache more and more blocks. */
EXPORTED void red_zones_check(int all) {
  pthread_mutex_lock(&lock);
  size_t first = all ? 0 : serial_of_whole_check;
  for (size_t slot = 0; slot < ENTRIES; slot++)
    if (table[slot].block != NULL && table[slot].block != TOMBSTONE && table[slot].serial > first) check(&table[slot]);
  if (all) serial_of_whole_check = last_serial;
  pthread_mutex_unlock(&lock);
}

EXPORTED int posix_memalign(void **result, size_t alignment, size_t size) {
  resolve();
  if (alignment < ALIGNMENT) alignment = ALIGNMENT;
  size_t before = alignment > LEAST_ZONE ? alignment : LEAST_ZONE;
  size_t behind = LEAST_ZONE + (size < MOST_ZONE / 16 ? 16 * size : MOST_ZONE);
  if (size > SIZE_MAX - before - behind) return ENOMEM;
  void *base = NULL;
  int error = next_memalign(&base, alignment, before + size + behind);
  if (error != 0) return error;
  unsigned char *block = (unsigned char *)base + before;
  pthread_mutex_lock(&lock);
  if (live < ENTRIES / 2) {
    size_t slot = slot_of(block);
    while (table[slot].block != NULL && table[slot].block != TOMBSTONE) slot = (slot + 1) % ENTRIES;
    memset(base, PATTERN, before);
    memset(block + size, PATTERN, behind);
    table[slot] = (Entry){block, base, size, behind, ++last_serial};
    live++;
  } else {
    block = base;
  }
  pthread_mutex_unlock(&lock);
  memset(block, GARBAGE, size);
  *result = block;
  return 0;
}

EXPORTED void *memalign(size_t alignment, size_t size) {
  void *block = NULL;
  int error = posix_memalign(&block, alignment, size);
  if (error != 0) errno = error;
  return error == 0 ? block : NULL;
}

EXPORTED void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

EXPORTED void free(void *block) {
  if (next_free == NULL) {
    resolve();
    if (next_free == NULL) return; /* a block of the dynamic linker itself, freed during resolve() */
  }
  if (block != NULL && (uintptr_t)block % ALIGNMENT == 0) {
    pthread_mutex_lock(&lock);
    Entry *entry = find(block);
    if (entry != NULL) {
      check(entry);
      block = entry->base;
      entry->block = TOMBSTONE;
      live--;
    }
    pthread_mutex_unlock(&lock);
  }
  next_free(block);
}

EXPORTED size_t malloc_usable_size(void *block) {
  resolve();
  pthread_mutex_lock(&lock);
  Entry *entry = find(block);
  size_t size = entry != NULL ? entry->size : 0;
  pthread_mutex_unlock(&lock);
  return size != 0 ? size : next_usable_size(block);
}

EXPORTED void *realloc(void *block, size_t size) {
  resolve();
  pthread_mutex_lock(&lock);
  Entry *entry = block != NULL ? find(block) : NULL;
  size_t had = entry != NULL ? entry->size : 0;
  pthread_mutex_unlock(&lock);
  if (entry == NULL) return next_realloc(block, size);
  void *moved = malloc(size);
  if (moved != NULL) {
    memcpy(moved, block, had < size ? had : size);
    free(block);
  }
  return moved;
}
