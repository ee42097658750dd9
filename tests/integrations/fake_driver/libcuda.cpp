// Replaces the part of libcuda.so.1 that `pdkernels.integrations.while_graph` calls, so that cuda-python's own
// marshalling is part of a test that needs no GPU. Declarations come from NVIDIA's cuda.h. Graphs are kept and
// executed: a kernel is a function of the test. What a driver refuses is refused here too.
#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct CUgraph_st;
using Function = void (*)(int);

struct CUgraphNode_st {
  CUgraphNodeType type;
  std::vector<CUgraphNode> dependencies;
  int function = 0;         // a kernel: its number in the test
  CUgraph child = nullptr;  // a child graph, or the body of a conditional node
  CUgraph bodies[2] = {};   // of a conditional node: the second is what an IF node runs if its value is 0
  CUgraphConditionalNodeType kind = CU_GRAPH_COND_TYPE_WHILE;
  CUgraphConditionalHandle handle = 0;
};

struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
  CUgraph outer = nullptr;  // of a body: the graph that handles belong to
  bool conditional_inside = false;
  int executables = 0;
};

struct CUgraphExec_st {
  CUgraph graph;
};

namespace {

struct Condition {
  CUgraph graph;
  unsigned start, value;
  bool in_use;
};
struct Capture {
  CUgraph graph;
  std::vector<CUgraphNode> last;
};

const CUcontext kContext = reinterpret_cast<CUcontext>(0xc0de);
// Beyond int64, as a handle may be.
CUgraphConditionalHandle next_handle = 0x8000000000000005ull;
int version = 13000;
Function run_function = nullptr;
std::map<CUgraphConditionalHandle, Condition> conditions;
std::map<CUstream, Capture> captures;

CUgraphNode add(CUgraph graph, CUgraphNodeType type, const CUgraphNode* dependencies, size_t count) {
  const auto inside = [&](CUgraphNode node) {
    return std::any_of(graph->nodes.begin(), graph->nodes.end(), [&](const auto& own) { return own.get() == node; });
  };
  for (size_t i = 0; i < count; ++i) {
    if (!inside(dependencies[i])) return nullptr;
  }
  graph->nodes.push_back(std::make_unique<CUgraphNode_st>());
  CUgraphNode node = graph->nodes.back().get();
  node->type = type;
  if (count > 0) node->dependencies.assign(dependencies, dependencies + count);
  return node;
}

// Nodes are made in an order that their dependencies allow, but two that do not wait for each other may run at once.
bool in_sequence(const CUgraph_st& graph) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const CUgraph inside : {graph.nodes[i]->child, graph.nodes[i]->bodies[1]}) {
      if (inside != nullptr && !in_sequence(*inside)) return false;
    }
    if (i == 0) continue;
    const auto& dependencies = graph.nodes[i]->dependencies;
    if (std::find(dependencies.begin(), dependencies.end(), graph.nodes[i - 1].get()) == dependencies.end())
      return false;
  }
  return true;
}

// An endless loop would hang a GPU: here it is an error.
struct Endless {};

void execute(const CUgraph_st& graph) {
  for (const auto& node : graph.nodes) {
    if (node->type == CU_GRAPH_NODE_TYPE_KERNEL) {
      run_function(node->function);
    } else if (node->type == CU_GRAPH_NODE_TYPE_GRAPH) {
      execute(*node->child);
    } else if (node->kind == CU_GRAPH_COND_TYPE_IF) {
      execute(*node->bodies[conditions.at(node->handle).value == 0]);
    } else {
      for (int rounds = 0; conditions.at(node->handle).value != 0; ++rounds) {
        if (rounds == 1000) throw Endless();
        execute(*node->child);
      }
    }
  }
}

CUresult init(unsigned) { return CUDA_SUCCESS; }
CUresult driver_version(int* out) { return *out = version, CUDA_SUCCESS; }
CUresult current_context(CUcontext* out) { return *out = kContext, CUDA_SUCCESS; }
CUresult error_string(CUresult, const char** out) { return *out = "refused by the fake driver", CUDA_SUCCESS; }

CUresult graph_create(CUgraph* out, unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return *out = new CUgraph_st, CUDA_SUCCESS;
}

CUresult graph_destroy(CUgraph graph) { return delete graph, CUDA_SUCCESS; }

CUresult handle_create(CUgraphConditionalHandle* out, CUgraph graph, CUcontext context, unsigned start,
                       unsigned flags) {
  if (context != kContext || flags != CU_GRAPH_COND_ASSIGN_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  *out = next_handle++;
  conditions[*out] = {graph, start, 0, false};
  return CUDA_SUCCESS;
}

// Edges may be left out; one that is not zero would let a node start before the other has ended.
bool plain(const CUgraphEdgeData* edges, size_t count) {
  const CUgraphEdgeData none{};
  return edges == nullptr || std::all_of(edges, edges + count,
                                         [&](const auto& edge) { return std::memcmp(&edge, &none, sizeof none) == 0; });
}

CUresult begin_capture(CUstream stream, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                       size_t count, CUstreamCaptureMode mode) {
  if (captures.count(stream) || !plain(edges, count) || mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    return CUDA_ERROR_INVALID_VALUE;
  captures[stream].graph = graph;
  if (count > 0) captures[stream].last.assign(dependencies, dependencies + count);
  return CUDA_SUCCESS;
}

CUresult end_capture(CUstream stream, CUgraph* out) {
  const auto capture = captures.extract(stream);
  if (capture.empty()) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  return *out = capture.mapped().graph, CUDA_SUCCESS;
}

CUresult get_nodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  if (nodes == nullptr) return *count = graph->nodes.size(), CUDA_SUCCESS;
  *count = std::min(*count, graph->nodes.size());
  for (size_t i = 0; i < *count; ++i) nodes[i] = graph->nodes[i].get();
  return CUDA_SUCCESS;
}

CUresult node_type(CUgraphNode node, CUgraphNodeType* out) { return *out = node->type, CUDA_SUCCESS; }

CUresult add_node(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                  size_t count, CUgraphNodeParams* params) {
  CUDA_CONDITIONAL_NODE_PARAMS& loop = params->conditional;
  const auto condition = conditions.find(loop.handle);
  const CUgraph outer = graph->outer == nullptr ? graph : graph->outer;
  const unsigned size = loop.type == CU_GRAPH_COND_TYPE_IF ? 2 : 1;
  if (params->type != CU_GRAPH_NODE_TYPE_CONDITIONAL || loop.type == CU_GRAPH_COND_TYPE_SWITCH || loop.size != size ||
      !plain(edges, count) || loop.ctx != kContext || condition == conditions.end() ||
      condition->second.graph != outer || condition->second.in_use) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *out = add(graph, params->type, dependencies, count);
  if (*out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned body = 0; body < size; ++body) ((*out)->bodies[body] = new CUgraph_st)->outer = outer;
  (*out)->child = (*out)->bodies[0];
  (*out)->kind = loop.type;
  (*out)->handle = loop.handle;
  condition->second.in_use = graph->conditional_inside = true;
  loop.phGraph_out = (*out)->bodies;
  return CUDA_SUCCESS;
}

CUresult add_child(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count, CUgraph child) {
  if (child->conditional_inside) return CUDA_ERROR_NOT_SUPPORTED;
  *out = add(graph, CU_GRAPH_NODE_TYPE_GRAPH, dependencies, count);
  if (*out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return (*out)->child = child, CUDA_SUCCESS;
}

CUresult instantiate(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  if (flags != 0 || graph->executables++ > 0 || !in_sequence(*graph)) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [handle, condition] : conditions) {
    if (condition.graph == graph && !condition.in_use) return CUDA_ERROR_INVALID_VALUE;
  }
  return *out = new CUgraphExec_st{graph}, CUDA_SUCCESS;
}

CUresult launch(CUgraphExec executable, CUstream) {
  for (auto& [handle, condition] : conditions) condition.value = condition.start;
  try {
    execute(*executable->graph);
  } catch (Endless) { return CUDA_ERROR_LAUNCH_TIMEOUT; }
  return CUDA_SUCCESS;
}

CUresult exec_destroy(CUgraphExec executable) { return delete executable, CUDA_SUCCESS; }

// The assignments are the test of these signatures against cuda.h.
const std::map<std::string, void*> kFunctions = [] {
  decltype(&cuInit) p1 = init;
  decltype(&cuDriverGetVersion) p2 = driver_version;
  decltype(&cuCtxGetCurrent) p3 = current_context;
  decltype(&cuGetErrorString) p4 = error_string;
  decltype(&cuGraphCreate) p5 = graph_create;
  decltype(&cuGraphDestroy) p6 = graph_destroy;
  decltype(&cuGraphConditionalHandleCreate) p7 = handle_create;
  decltype(&cuStreamBeginCaptureToGraph) p8 = begin_capture;
  decltype(&cuStreamEndCapture) p9 = end_capture;
  decltype(&cuGraphGetNodes) p10 = get_nodes;
  decltype(&cuGraphAddNode) p11 = add_node;
  decltype(&cuGraphAddChildGraphNode) p12 = add_child;
  decltype(&cuGraphInstantiateWithFlags) p13 = instantiate;
  decltype(&cuGraphLaunch) p14 = launch;
  decltype(&cuGraphExecDestroy) p15 = exec_destroy;
  decltype(&cuGraphNodeGetType) p16 = node_type;
  const auto raw = [](auto* function) { return reinterpret_cast<void*>(function); };
  return std::map<std::string, void*>{{"cuInit", raw(p1)},
                                      {"cuDriverGetVersion", raw(p2)},
                                      {"cuCtxGetCurrent", raw(p3)},
                                      {"cuGetErrorString", raw(p4)},
                                      {"cuGraphCreate", raw(p5)},
                                      {"cuGraphDestroy", raw(p6)},
                                      {"cuGraphConditionalHandleCreate", raw(p7)},
                                      {"cuStreamBeginCaptureToGraph", raw(p8)},
                                      {"cuStreamEndCapture", raw(p9)},
                                      {"cuGraphGetNodes", raw(p10)},
                                      {"cuGraphAddNode", raw(p11)},
                                      {"cuGraphAddChildGraphNode", raw(p12)},
                                      {"cuGraphInstantiateWithFlags", raw(p13)},
                                      {"cuGraphLaunch", raw(p14)},
                                      {"cuGraphExecDestroy", raw(p15)},
                                      {"cuGraphNodeGetType", raw(p16)}};
}();

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

#undef cuGetProcAddress
EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult* found) {
  const auto known = kFunctions.find(symbol);
  *function = known == kFunctions.end() ? nullptr : known->second;
  if (found != nullptr) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// For the test.
EXPORT void fake_functions(Function run) { run_function = run; }
EXPORT void fake_version(int number) { version = number; }
EXPORT void fake_set_condition(CUgraphConditionalHandle handle, unsigned value) { conditions.at(handle).value = value; }
// Launches a kernel on a stream that captures; 0 where it does not.
EXPORT int fake_launch(CUstream stream, int function) {
  const auto capture = captures.find(stream);
  if (capture == captures.end()) return 0;
  auto& [graph, last] = capture->second;
  CUgraphNode node = add(graph, CU_GRAPH_NODE_TYPE_KERNEL, last.data(), last.size());
  node->function = function;
  last = {node};
  return 1;
}
