//! Our schemas against upstream's, and the files in `deploy/crds` against the code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::*;

fn plurals() -> [&'static str; 9] {
    Kind::ALL.map(|kind| kind.info().plural)
}

/// Those of the kinds that OpenKruise has.
fn upstream_plurals() -> impl Iterator<Item = &'static str> {
    plurals()
        .into_iter()
        .filter(|plural| *plural != "containerrecreatejobs")
}

/// What only our schemas have. Everything here is optional for a client.
const ADDITIONS: &[&str] = &[
    // Named so that rules can use them; upstream's schema allows any field there.
    "clonesets .spec.template.spec",
    "clonesets .spec.template.spec.activeDeadlineSeconds",
    "clonesets .spec.template.spec.restartPolicy",
    "clonesets .spec.volumeClaimTemplates[]",
    "containerrecreaterequests .spec.containers[].preStop.sleep",
    "containerrecreaterequests .spec.containers[].preStop.sleep.seconds",
    "containerrecreaterequests .status.containerRecreateStates[].containerID",
    "imagelistpulljobs .spec.pullPolicy.pinSeconds",
    "imagelistpulljobs .spec.schedule",
    "imagelistpulljobs .spec.serviceAccountName",
    "imagelistpulljobs .status.conditions",
    "imagelistpulljobs .status.conditions[]",
    "imagelistpulljobs .status.conditions[].lastTransitionTime",
    "imagelistpulljobs .status.conditions[].message",
    "imagelistpulljobs .status.conditions[].observedGeneration",
    "imagelistpulljobs .status.conditions[].reason",
    "imagelistpulljobs .status.conditions[].status",
    "imagelistpulljobs .status.conditions[].type",
    "imagepulljobs .spec.pullPolicy.pinSeconds",
    "imagepulljobs .spec.schedule",
    "imagepulljobs .spec.serviceAccountName",
    "imagepulljobs .status.conditions",
    "imagepulljobs .status.conditions[]",
    "imagepulljobs .status.conditions[].lastTransitionTime",
    "imagepulljobs .status.conditions[].message",
    "imagepulljobs .status.conditions[].observedGeneration",
    "imagepulljobs .status.conditions[].reason",
    "imagepulljobs .status.conditions[].status",
    "imagepulljobs .status.conditions[].type",
    "imagepulljobs .status.progress",
    "nodeimages .spec.images{}.serviceAccounts",
    "nodeimages .spec.images{}.serviceAccounts[]",
    "nodeimages .spec.images{}.serviceAccounts[].name",
    "nodeimages .spec.images{}.serviceAccounts[].namespace",
    "nodeimages .spec.images{}.tags[].pullPolicy.pinSeconds",
    "nodeimages .status.conditions",
    "nodeimages .status.conditions[]",
    "nodeimages .status.conditions[].lastTransitionTime",
    "nodeimages .status.conditions[].message",
    "nodeimages .status.conditions[].observedGeneration",
    "nodeimages .status.conditions[].reason",
    "nodeimages .status.conditions[].status",
    "nodeimages .status.conditions[].type",
    "nodeimages .status.imageStatuses{}.tags[].bytes",
    "nodeimages .status.imageStatuses{}.tags[].bytes.done",
    "nodeimages .status.imageStatuses{}.tags[].bytes.total",
    "nodeimages .status.progress",
    "nodepodprobes .status.podProbeStatuses[].probeStates[].containerID",
    "sidecarsets .spec.volumes[]",
    "sidecarsets .status.conditions",
    "sidecarsets .status.conditions[]",
    "sidecarsets .status.conditions[].lastTransitionTime",
    "sidecarsets .status.conditions[].message",
    "sidecarsets .status.conditions[].observedGeneration",
    "sidecarsets .status.conditions[].reason",
    "sidecarsets .status.conditions[].status",
    "sidecarsets .status.conditions[].type",
    "sidecarsets .status.notInjectedPods",
];

/// What upstream requires and we default, so that an object without it is valid even if no webhook serves.
const DEFAULTED: [&str; 2] = [
    "imagelistpulljobs .spec.completionPolicy",
    "imagepulljobs .spec.completionPolicy",
];

/// Keywords that must be equal if upstream has them. Our other keywords can only be checks.
const KEYWORDS: [&str; 14] = [
    "type",
    "format",
    "enum",
    "default",
    "maxLength",
    "minLength",
    "pattern",
    "nullable",
    "anyOf",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
    "x-kubernetes-preserve-unknown-fields",
];

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    serde_yaml::from_str(&text).unwrap()
}

fn upstream(plural: &str) -> Value {
    read(&root().join(format!("tests/data/crds/apps.kruise.io_{plural}.yaml")))
}

fn ours(plural: &str) -> Value {
    let found = crds().into_iter().find(|crd| crd.spec.names.plural == plural);
    serde_json::to_value(found.unwrap()).unwrap()
}

/// Every schema of a version by its path, children left out.
fn flatten(schema: &Value, path: &str, into: &mut BTreeMap<String, Value>) {
    let mut node = schema.as_object().unwrap().clone();
    for (name, child) in node
        .remove("properties")
        .iter()
        .flat_map(|all| all.as_object().unwrap())
    {
        flatten(child, &format!("{path}.{name}"), into);
    }
    if let Some(child) = node.remove("items") {
        flatten(&child, &format!("{path}[]"), into);
    }
    if let Some(child) = node.remove("additionalProperties").filter(Value::is_object) {
        flatten(&child, &format!("{path}{{}}"), into);
    }
    into.insert(path.to_owned(), Value::Object(node));
}

fn versions(crd: &Value) -> BTreeMap<String, Value> {
    let all = crd["spec"]["versions"].as_array().unwrap();
    all.iter()
        .map(|version| (version["name"].as_str().unwrap().to_owned(), version.clone()))
        .collect()
}

fn paths(version: &Value) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    flatten(&version["schema"]["openAPIV3Schema"], "", &mut all);
    all
}

/// Equality of JSON values; 0 and 0.0 are equal.
fn equal(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

fn sorted(list: &Value) -> BTreeSet<String> {
    list.as_array()
        .into_iter()
        .flatten()
        .map(|word| word.as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn kind_info_matches_the_crds() {
    for kind in Kind::ALL {
        let (row, crd) = (kind.info(), crd(kind).unwrap());
        assert_eq!(crd.metadata.name.unwrap(), kind.crd_name());
        assert_eq!(crd.spec.names.kind, row.name);
        assert_eq!(crd.spec.names.plural, row.plural);
        assert_eq!(row.name.to_lowercase(), row.lowercase);
        assert_eq!(Kind::from_name(row.name), Some(kind));
        assert_eq!(Kind::from_lowercase(row.lowercase), Some(kind));
    }
}

#[test]
fn every_upstream_path_exists() {
    for plural in upstream_plurals() {
        let (theirs, ours) = (versions(&upstream(plural)), versions(&ours(plural)));
        assert_eq!(theirs.keys().collect::<Vec<_>>(), ours.keys().collect::<Vec<_>>());
        for (name, version) in &theirs {
            let (theirs, ours) = (paths(version), paths(&ours[name]));
            for (path, their) in &theirs {
                let our = ours
                    .get(path)
                    .unwrap_or_else(|| panic!("{plural} {name}: {path} is missing"));
                for keyword in KEYWORDS {
                    let (their, our) = (&their[keyword], &our[keyword]);
                    let same = if keyword == "enum" {
                        // The empty phase of a request that has conditions and no daemon has started.
                        let mut our = sorted(our);
                        if path == ".status.phase" && plural == "containerrecreaterequests" {
                            our.remove("");
                        }
                        sorted(their) == our
                    } else {
                        equal(their, our)
                    };
                    assert!(
                        their.is_null() || same,
                        "{plural} {name}: {path} has {keyword} {our}, upstream {their}"
                    );
                }
                // A limit may be narrower if upstream's admission has the narrower one.
                if let Some(minimum) = their["minimum"].as_f64() {
                    assert!(
                        our["minimum"].as_f64() >= Some(minimum),
                        "{plural} {name}: {path} has no minimum"
                    );
                }
                let (mut their, our) = (sorted(&their["required"]), sorted(&our["required"]));
                their.retain(|field| !DEFAULTED.contains(&format!("{plural} {path}.{field}").as_str()));
                let spec_required: BTreeSet<_> = [String::from("spec")].into();
                assert!(
                    their == our || (path.is_empty() && our == spec_required),
                    "{plural} {name}: {path} requires {our:?}, upstream {their:?}"
                );
            }
        }
    }
}

#[test]
fn additions_to_upstream_are_listed() {
    for plural in upstream_plurals() {
        let (theirs, ours) = (versions(&upstream(plural)), versions(&ours(plural)));
        for (name, version) in &ours {
            let upstream_paths = paths(&theirs[name]);
            let added: Vec<_> = paths(version)
                .into_keys()
                .filter(|path| !upstream_paths.contains_key(path))
                .map(|path| format!("{plural} {path}"))
                .filter(|path| !ADDITIONS.contains(&path.as_str()))
                .collect();
            assert!(added.is_empty(), "{plural} {name} adds {added:?}");
        }
    }
}

#[test]
fn names_columns_and_subresources_match_upstream() {
    for plural in upstream_plurals() {
        let (theirs, ours) = (upstream(plural), ours(plural));
        assert_eq!(theirs["metadata"]["name"], ours["metadata"]["name"]);
        for key in ["group", "scope", "names"] {
            assert_eq!(theirs["spec"][key], ours["spec"][key], "{plural} {key}");
        }
        let ours = versions(&ours);
        for (name, their) in versions(&theirs) {
            let our = &ours[&name];
            for key in ["served", "storage", "subresources"] {
                assert_eq!(their[key], our[key], "{plural} {name} {key}");
            }
            let columns = |version: &Value| -> Vec<Value> {
                let mut columns = version["additionalPrinterColumns"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                columns.iter_mut().for_each(|column| {
                    column.as_object_mut().unwrap().remove("description");
                });
                columns
            };
            let their = columns(&their);
            let (same, added): (Vec<_>, Vec<_>) = columns(our).into_iter().partition(|c| their.contains(c));
            assert_eq!(their, same, "{plural} {name}");
            let added = added
                .iter()
                .map(|column| (column["name"].as_str().unwrap(), column["priority"].as_i64()));
            let expected: &[&str] = match (plural, name.as_str()) {
                ("clonesets" | "imagelistpulljobs", _) => &["REASON", "MESSAGE"],
                ("sidecarsets", _) => &["NOT_INJECTED", "REASON", "MESSAGE"],
                ("imagepulljobs", "v1alpha1") => &["PROGRESS", "IMAGE", "REASON"],
                ("imagepulljobs", _) => &["PROGRESS", "IMAGE", "REASON", "MESSAGE"],
                ("nodepodprobes", _) => &[],
                ("podprobemarkers", _) => &["MATCHED", "AGE"],
                ("nodeimages", _) => &["PROGRESS", "MESSAGE"],
                (_, "v1alpha1") => &["MESSAGE"],
                _ => &["RESULT", "MESSAGE"],
            };
            // A kind without columns in OpenKruise has only AGE there, and a watch of the usual columns shows progress.
            let is_usual = |column: &str| plural == "podprobemarkers" || column == "PROGRESS";
            let expected = expected.iter();
            let expected = expected.map(|column| (*column, (!is_usual(column)).then_some(1)));
            assert_eq!(
                added.collect::<Vec<_>>(),
                expected.collect::<Vec<_>>(),
                "{plural} {name}"
            );
        }
    }
}

#[test]
fn wide_request_columns_show_condition_or_message() {
    for (name, version) in versions(&ours("containerrecreaterequests")) {
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        let wide = columns.iter().filter(|column| column["priority"] == 1);
        let wide: Vec<_> = wide
            .map(|c| (c["name"].as_str().unwrap(), c["jsonPath"].as_str().unwrap()))
            .collect();
        let ours = |field| format!(r#".status.conditions[?(@.type!="PreRecreateGrace")].{field}"#);
        let (type_, message) = (ours("type"), ours("message"));
        let expected = match name.as_str() {
            "v1alpha1" => vec![("MESSAGE", ".status.message")],
            _ => vec![("RESULT", type_.as_str()), ("MESSAGE", message.as_str())],
        };
        assert_eq!(wide, expected, "{name}");
    }
}

#[test]
fn request_phase_may_be_empty() {
    let ours = versions(&ours("containerrecreaterequests"));
    let status = &ours["v1beta1"]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"];
    assert_eq!(status["phase"]["enum"][0], "");
}

/// The API server requires `type` everywhere, except for int-or-string.
#[test]
fn schemas_are_structural() {
    for plural in plurals() {
        for (name, version) in versions(&ours(plural)) {
            for (path, node) in paths(&version) {
                let typed = node["type"].is_string() || node["x-kubernetes-int-or-string"] == true;
                assert!(typed, "{plural} {name}: {path} has no type");
            }
        }
    }
}

/// Fields that may be as long as an object, because the API server keeps every field of them.
const WITHOUT_MAXIMUM: &[(&str, &str)] = &[
    (
        ".spec.template",
        "as core/v1.PodTemplateSpec: the webhook holds its lists against a maximum",
    ),
    (".spec.template.spec", "the same"),
    (".spec.volumeClaimTemplates[]", "as core/v1.PersistentVolumeClaim"),
    (".spec.containers[]", "as core/v1.Container"),
    (".spec.initContainers[]", "the same"),
    (".spec.volumes[]", "as core/v1.Volume"),
];

/// Whether this schema limits every part of its values; the keys of a map are limited by a rule.
fn has_maximum(node: &Value, is_map: bool) -> bool {
    let keys_are_short = || {
        let rules = node["x-kubernetes-validations"].as_array().into_iter().flatten();
        let mut rules = rules.filter_map(|rule| rule["rule"].as_str());
        rules.any(|rule| rule.starts_with("self.all(") && rule.contains("size("))
    };
    match node["type"].as_str() {
        Some("array") => node["maxItems"].is_u64(),
        Some("object") if is_map => node["maxProperties"].is_u64() && keys_are_short(),
        Some("object") => node["x-kubernetes-preserve-unknown-fields"] != true,
        Some("string") | None => node["maxLength"].is_u64() || node["enum"].is_array(),
        _ => true,
    }
}

/// Each string takes some 32 bytes of memory, however short it is, and an object of 1.5 MiB has room for half a
/// million.
#[test]
fn every_spec_list_map_and_string_has_a_maximum() {
    let mut without = BTreeSet::new();
    for plural in plurals() {
        for (version, schema) in versions(&ours(plural)) {
            let all = paths(&schema);
            for (path, node) in all.iter().filter(|(path, _)| path.starts_with(".spec")) {
                let is_map = all.contains_key(&format!("{path}{{}}"));
                if has_maximum(node, is_map) {
                    continue;
                }
                let known = WITHOUT_MAXIMUM.iter().any(|(known, _)| known == path);
                assert!(known, "{plural} {version}: {path} has no maximum");
                without.insert(path.clone());
            }
        }
    }
    let known: BTreeSet<String> = WITHOUT_MAXIMUM
        .iter()
        .map(|(path, _)| (*path).to_owned())
        .collect();
    assert_eq!(without, known, "what has a maximum needs no reason");
}

/// A rule whose path does not exist would be ignored silently.
#[test]
fn every_rule_path_exists() {
    for kind in Kind::ALL.map(definition) {
        let plural = &kind.versions.last().unwrap().spec.names.plural;
        for (name, version) in versions(&ours(plural)) {
            let all = paths(&version);
            for (below, rule) in kind.rules(&name) {
                let path = format!(".{below}.{}", rule.path)
                    .replace("..", ".")
                    .replace(".[]", "[]")
                    .replace(".{}", "{}");
                let node = all
                    .get(&path)
                    .unwrap_or_else(|| panic!("{plural} {name}: no {path}"));
                for (keyword, value) in (rule.add)().as_object().unwrap() {
                    let there = &node[keyword];
                    let found = match value.as_array() {
                        Some(expected) => expected
                            .iter()
                            .all(|one| there.as_array().is_some_and(|all| all.contains(one))),
                        None => equal(there, value),
                    };
                    assert!(found, "{plural} {name}: {path} lacks {keyword}");
                }
            }
        }
    }
}
