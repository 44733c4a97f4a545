// Mappings of other processes' memory, and sleeping and waking between processes by futex.
#include "peer.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include <c10/util/Exception.h>

namespace neuron {

namespace {
struct OwnBell {
  int fd;
  Bell* bell;
};

// Never destroyed: peers may ring until the process ends.
const OwnBell& own() {
  static const OwnBell instance = [] {
    const int fd = memfd_create("neuron-bell", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(sizeof(Bell))) == 0, "Cannot create shared memory: errno ", errno);
    size_t bytes = 0;
    return OwnBell{fd, new (map_shared(fd, bytes)) Bell};
  }();
  return instance;
}

using Identity = std::pair<dev_t, ino_t>;

std::mutex known_mutex;
std::map<Identity, std::weak_ptr<Peer>>& known() {
  static auto* instance = new std::map<Identity, std::weak_ptr<Peer>>;
  return *instance;
}

// A mapping keeps its file's number from being used again, so the number tells processes apart.
Identity identity(int fd) {
  struct stat status {};
  TORCH_CHECK(fstat(fd, &status) == 0, "Cannot look at a peer's memory: errno ", errno);
  return {status.st_dev, status.st_ino};
}
}  // namespace

Bell& own_bell() { return *own().bell; }
int own_bell_fd() { return own().fd; }

void ring(Bell& bell) {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) syscall(SYS_futex, &bell.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_until_rung(Bell& bell, uint32_t seen, std::chrono::milliseconds longest) {
  const timespec time{static_cast<time_t>(longest.count() / 1000), static_cast<long>(longest.count() % 1000 * 1000000)};
  // Counted before looking again: whoever rings after the look sees a sleeper and wakes it.
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (bell.rings.load(std::memory_order_seq_cst) == seen) syscall(SYS_futex, &bell.rings, FUTEX_WAIT, seen, &time, nullptr, 0);
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

char* map_shared(int fd, size_t& bytes) {
  struct stat status {};
  TORCH_CHECK(fstat(fd, &status) == 0 && status.st_size > 0, "Cannot map shared memory: errno ", errno);
  bytes = static_cast<size_t>(status.st_size);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  TORCH_CHECK(mapped != MAP_FAILED, "Cannot map ", bytes >> 20, " MiB of shared memory: errno ", errno, "; see `ulimit -v`.");
  madvise(mapped, bytes, MADV_DONTDUMP);
  return static_cast<char*>(mapped);
}

std::shared_ptr<Peer> Peer::map(int hbm_fd, int bell_fd, int pidfd) {
  std::lock_guard<std::mutex> lock(known_mutex);
  auto& slot = known()[identity(hbm_fd)];
  auto peer = slot.lock();
  if (peer) {
    close(pidfd);
  } else {
    peer = std::shared_ptr<Peer>(new Peer);
    peer->pidfd_ = pidfd;
    peer->hbm_ = map_shared(hbm_fd, peer->hbm_bytes_);
    peer->bell_ = reinterpret_cast<Bell*>(map_shared(bell_fd, peer->bell_bytes_));
    slot = peer;
  }
  close(hbm_fd);
  close(bell_fd);
  return peer;
}

Peer::~Peer() {
  if (hbm_) munmap(hbm_, hbm_bytes_);
  if (bell_) munmap(bell_, bell_bytes_);
  close(pidfd_);
}

bool Peer::alive() const {
  pollfd entry{pidfd_, POLLIN, 0};
  return poll(&entry, 1, 0) <= 0;
}

}  // namespace neuron
