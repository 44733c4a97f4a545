// How many bytes the host can still give: MemAvailable, and the limits of the control groups this process is in.
#include "arena.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace neuron {

namespace {
constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();
// Kept free for the Python processes themselves, so that the kernel never has to kill one.
constexpr size_t kMargin = size_t(256) << 20;

size_t read_number(const std::string& path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : kUnlimited;  // "max" and a missing file both mean no limit
}

// The value of `key` in a file of "key value" lines; `scale` is its unit in bytes.
size_t read_field(const std::string& path, const std::string& key, size_t scale, size_t otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    size_t value = 0;
    if (words >> name >> value && name == key) return value * scale;
  }
  return otherwise;
}

// Room below one control group's limit. Page cache that nobody uses is given back by the kernel first, so it counts as room.
size_t group_room(size_t limit, size_t used, size_t reclaimable) {
  if (limit == kUnlimited || used == kUnlimited) return kUnlimited;
  used -= std::min(used, reclaimable);
  return limit - std::min(limit, used);
}

size_t cgroup_room() {
  size_t room = kUnlimited;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && controllers.find("memory") == std::string::npos) continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    // A limit may sit on any ancestor; inside a container the path may also be visible from its root only.
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      const std::string group = root + (path == "/" ? "" : path);
      const size_t reclaimable = read_field(group + "/memory.stat", unified ? "inactive_file" : "total_inactive_file", 1, 0);
      room = std::min(
          room,
          unified ? group_room(read_number(group + "/memory.max"), read_number(group + "/memory.current"), reclaimable)
                  : group_room(read_number(group + "/memory.limit_in_bytes"), read_number(group + "/memory.usage_in_bytes"), reclaimable));
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return room;
}
}  // namespace

size_t host_bytes_available() {
  const size_t available = std::min(read_field("/proc/meminfo", "MemAvailable:", 1024, kUnlimited), cgroup_room());
  return available - std::min(available, kMargin);
}

}  // namespace neuron
