// A weight's elements on their way from memory to a tile.

inline uint component(uint4 word, int index) {
  return index == 0 ? word.x : index == 1 ? word.y : index == 2 ? word.z : word.w;
}

// Which two of 8 neighbours make a pair is arbitrary as long as both factors agree. Of packed integers it is those that lie
// 16 bits apart, so that one shift and one mask bring both where a pair of T has its mantissas: of 4 bits i and i + 4, of 8
// bits i and i + 2 of each four.

// 8 neighbours of T, lowest first, in pairs.
template <int BITS>
inline uint4 paired(uint4 word) {
  if (BITS == 0) return word;
  uint4 out;
  const uint b = BITS == 4 ? word.z : word.y;
  const uint c = BITS == 4 ? word.y : word.z;
  out.x = (word.x & 0xffffu) | b << 16;
  out.y = word.x >> 16 | (b & 0xffff0000u);
  out.z = (c & 0xffffu) | word.w << 16;
  out.w = c >> 16 | (word.w & 0xffff0000u);
  return out;
}

// The pair-th pair among 16 bytes of a weight: T as they are (BITS = 0), else integers that become integer * scale + bias.
template <typename T, int BITS>
inline uint unpacked(uint4 word, int pair, T scale, T bias) {
  if (BITS == 0) return component(word, pair);
  constexpr uint MASK = BITS == 4 ? 0x000f000fu : 0x00ff00ffu;
  constexpr int PER_WORD = BITS > 0 ? 16 / BITS : 1;  // pairs in 32 bits
  const uint bits = component(word, pair / PER_WORD) >> (pair % PER_WORD * BITS) & MASK;
  return scaled_pair<BITS>(bits, scale, bias);
}
