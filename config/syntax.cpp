#include "troupe/config/syntax.hpp"

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include "troupe/config/printable.hpp"

namespace troupe::config {
namespace {

/// Ends the library's parser from within a callback; caught in `read_yaml`.
struct refusal : std::runtime_error {
  refusal(const YAML::Mark& mark, const std::string& why)
      : std::runtime_error{why}, line{mark.line + 1}, column{mark.column + 1} {}
  int line;
  int column;
};

class tree_builder : public YAML::EventHandler {
 public:
  /// The document's root. Call once, after its end.
  [[nodiscard]] yaml_node take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) throw refusal{mark, "a second document; a deployment is one document"};
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(make(mark, yaml_node::form::null), anchor, mark);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto known = anchors_.find(anchor);
    if (known == anchors_.end()) throw refusal{mark, "an alias inside the value that it names"};
    // Counts the copy before it is made.
    count(known->second.values, mark);
    if (open_.size() + known->second.depth > max_depth) throw too_deep(mark);
    if (!open_.empty()) {
      open_.back().depth = std::max(open_.back().depth, known->second.depth + 1);
    }
    add(known->second.node, 0, mark);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    // The library says "?" for a plain scalar without a tag and "!" for a quoted one.
    if (tag != "!") check_tag(mark, tag);
    yaml_node node = make(mark, yaml_node::form::scalar);
    node.text = value;
    node.quoted = tag == "!";
    add(std::move(node), anchor, mark);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value /*style*/) override {
    open(mark, tag, anchor, yaml_node::form::sequence);
  }
  void OnSequenceEnd() override { close(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value /*style*/) override {
    open(mark, tag, anchor, yaml_node::form::mapping);
  }
  void OnMapEnd() override { close(); }

 private:
  struct frame {
    yaml_node node;
    YAML::anchor_t anchor{0};
    YAML::Mark mark;
    std::optional<yaml_entry> key;  ///< of a mapping: read, its value is next
    std::size_t values_before{0};   ///< counted when it began
    std::size_t depth{1};           ///< its levels, itself included
  };
  struct anchored {
    yaml_node node;
    std::size_t values{1};
    std::size_t depth{0};
  };

  static refusal too_deep(const YAML::Mark& mark) {
    return refusal{mark, "more than " + std::to_string(max_depth) + " levels of nesting"};
  }

  static void check_tag(const YAML::Mark& mark, const std::string& tag) {
    if (!tag.empty() && tag != "?") {
      throw refusal{mark, "the tag `" + tag + "`; a deployment file has no tags"};
    }
  }

  void count(std::size_t values, const YAML::Mark& mark) {
    values_ += values;
    if (values_ > max_values) {
      throw refusal{mark, "more than " + std::to_string(max_values) +
                              " values, counting what aliases repeat"};
    }
  }

  yaml_node make(const YAML::Mark& mark, yaml_node::form kind) {
    count(1, mark);
    yaml_node node;
    node.kind = kind;
    node.line = mark.line + 1;
    node.column = mark.column + 1;
    return node;
  }

  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
            yaml_node::form kind) {
    check_tag(mark, tag);
    if (open_.size() >= max_depth) throw too_deep(mark);
    if (!open_.empty() && open_.back().node.is_mapping() && !open_.back().key) {
      throw refusal{mark, "a key that is a list or a mapping; keys are words"};
    }
    const std::size_t before = values_;
    frame next;
    next.node = make(mark, kind);
    next.anchor = anchor;
    next.mark = mark;
    next.values_before = before;
    open_.push_back(std::move(next));
  }

  void close() {
    frame done = std::move(open_.back());
    open_.pop_back();
    if (done.anchor != 0) {
      anchors_[done.anchor] = {done.node, values_ - done.values_before, done.depth};
    }
    if (!open_.empty()) open_.back().depth = std::max(open_.back().depth, done.depth + 1);
    place(std::move(done.node), done.mark);
  }

  void add(yaml_node node, YAML::anchor_t anchor, const YAML::Mark& mark) {
    if (anchor != 0) anchors_[anchor] = {node, 1, 0};
    place(std::move(node), mark);
  }

  /// Adds a complete node to the innermost open node.
  void place(yaml_node node, const YAML::Mark& mark) {
    if (open_.empty()) {
      root_ = std::move(node);
      return;
    }
    frame& parent = open_.back();
    if (!parent.node.is_mapping()) {
      parent.node.items.push_back(std::move(node));
    } else if (parent.key) {
      parent.key->value = std::move(node);
      parent.node.entries.push_back(std::move(*parent.key));
      parent.key.reset();
    } else if (node.kind == yaml_node::form::scalar) {
      parent.key = yaml_entry{std::move(node.text), mark.line + 1, mark.column + 1, {}};
    } else {
      throw refusal{mark, "a key that is not a word"};
    }
  }

  yaml_node root_;
  std::vector<frame> open_;
  std::map<YAML::anchor_t, anchored> anchors_;
  std::size_t values_{0};
  std::size_t documents_{0};
};

struct place_in_text {
  int line{1};
  int column{1};
  bool control{false};  ///< text, but a control character
};

/// The first place that is not UTF-8 text, or is a control character that YAML forbids.
std::optional<place_in_text> first_bad_byte(std::string_view text) {
  place_in_text at;
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text.front());
    const bool control =
        (first < 0x20 && first != '\t' && first != '\n' && first != '\r') || first == 0x7F;
    const std::size_t length = utf8_length(text);
    at.control = control;
    if (control || length == 0) return at;
    at.column += 1;
    if (first == '\n') at = {at.line + 1, 1, false};
    text.remove_prefix(length);
  }
  return std::nullopt;
}

/// Whether a line is indented with a tab: the cause of most invisible syntax errors.
bool indented_with_tab(std::string_view text, int line) {
  for (int i = 1; i < line; ++i) {
    const auto end = text.find('\n');
    if (end == std::string_view::npos) return false;
    text.remove_prefix(end + 1);
  }
  const auto first = text.find_first_not_of(' ');
  return first != std::string_view::npos && text[first] == '\t';
}

yaml_outcome refuse(const std::string& file, int line, int column, std::string message) {
  issue result;
  result.file = file;
  result.line = line;
  result.column = column;
  result.message = std::move(message);
  return {std::nullopt, std::move(result)};
}

yaml_outcome build_tree(std::string_view text, const std::string& file) {
  try {
    std::istringstream stream{std::string{text}};
    YAML::Parser parser{stream};
    tree_builder builder;
    while (parser.HandleNextDocument(builder)) {
    }
    return {builder.take(), std::nullopt};
  } catch (const refusal& e) {
    return refuse(file, e.line, e.column, "found " + std::string{e.what()});
  } catch (const YAML::Exception& e) {
    const bool known = !e.mark.is_null();
    const int line = known ? e.mark.line + 1 : 0;
    std::string why = "not YAML: " + e.msg;
    if (e.msg == YAML::ErrorMsg::END_OF_MAP_FLOW || e.msg == YAML::ErrorMsg::END_OF_SEQ_FLOW) {
      why += "; a bracket, a quote or a comma is missing before";
    }
    if (known && indented_with_tab(text, line)) {
      why = "not YAML: the line is indented with a tab; indent with spaces";
    }
    return refuse(file, line, known ? e.mark.column + 1 : 0, std::move(why));
  } catch (const std::exception& e) {
    return refuse(file, 0, 0, "not YAML: " + std::string{e.what()});
  }
}

}  // namespace

yaml_outcome read_yaml(std::string_view text, const std::string& file) {
  if (text.size() > max_file_bytes) {
    return refuse(file, 0, 0, "the file is larger than 1 MiB; a deployment is not");
  }
  if (const auto bad = first_bad_byte(text)) {
    return refuse(file, bad->line, bad->column,
                  bad->control ? "found a control character; a deployment file is text"
                               : "found a byte that is no UTF-8 text; save the file as UTF-8");
  }
  auto tree = build_tree(text, file);
  if (!tree.root) return tree;
  if (tree.root->kind == yaml_node::form::null) {
    return refuse(file, 0, 0,
                  "the file is empty; a deployment has at least `cluster` and "
                  "`stages`");
  }
  if (!tree.root->is_mapping()) {
    return refuse(file, tree.root->line, tree.root->column,
                  "found no keys; a deployment has at least `cluster` and `stages`");
  }
  return tree;
}

}  // namespace troupe::config
