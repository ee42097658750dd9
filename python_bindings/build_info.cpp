// What this library was built from and with, readable without torch: pdkernels.show_config() asks for it.

#if defined(__clang__)
#define PDK_COMPILER "clang " __clang_version__
#else
#define PDK_COMPILER "gcc " __VERSION__
#endif

extern "C" __attribute__((visibility("default"))) const char* pdkernels_build_info() {
  return "{\"version\": \"" PDKERNELS_VERSION "\", \"torch\": \"" PDKERNELS_TORCH_VERSION
         "\", \"compiler\": \"" PDK_COMPILER "\", \"cuda_archs\": \"" PDKERNELS_CUDA_ARCHS "\"}";
}
