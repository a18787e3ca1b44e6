//! The schemas of SidecarSet, which has no row of [`Kind`] and so no CRD yet.

use super::*;
use crate::sidecarset::SidecarSet;

/// What only our schemas have.
const ADDITIONS: [&str; 1] = [".spec.volumes[]"];
/// Defaults of upstream, which rules add to a CRD.
const DEFAULTS: [&str; 4] = [
    ".spec.containers[].resourcesPolicy.targetContainersNameRegex",
    ".spec.imagePullSecrets[].name",
    ".spec.initContainers[].resourcesPolicy.targetContainersNameRegex",
    ".spec.injectionStrategy.revision.policy",
];
/// Limited by the rules that CloneSet has at the same paths.
const LIMITED_BY_RULES: [&str; 6] = [
    ".spec.updateStrategy.priorityStrategy.orderPriority",
    ".spec.updateStrategy.priorityStrategy.orderPriority[].orderedKey",
    ".spec.updateStrategy.priorityStrategy.weightPriority",
    ".spec.updateStrategy.scatterStrategy",
    ".spec.updateStrategy.scatterStrategy[].key",
    ".spec.updateStrategy.scatterStrategy[].value",
];
/// Fields of which the API server keeps everything.
const RAW: [&str; 3] = [".spec.containers[]", ".spec.initContainers[]", ".spec.volumes[]"];

fn schema_paths(crd: &CustomResourceDefinition) -> BTreeMap<String, Value> {
    let schema = crd.spec.versions[0].schema.as_ref().unwrap();
    let mut schema = serde_json::to_value(&schema.open_api_v3_schema).unwrap();
    normalize_schema(&mut schema);
    let mut all = BTreeMap::new();
    flatten(&schema, "", &mut all);
    all.retain(|path, _| path.starts_with(".spec") || path.starts_with(".status"));
    all
}

fn both() -> [(&'static str, CustomResourceDefinition); 2] {
    [
        (V1ALPHA1, v1alpha1::SidecarSet::crd()),
        (V1BETA1, SidecarSet::crd()),
    ]
}

#[test]
fn schemas_match_upstream() {
    let upstream = upstream("sidecarsets");
    let (mut added, mut defaults) = (BTreeSet::new(), BTreeSet::new());
    for (version, crd) in both() {
        for key in ["group", "scope"] {
            let ours = serde_json::to_value(&crd.spec).unwrap();
            assert_eq!(ours[key], upstream["spec"][key]);
        }
        assert_eq!(crd.spec.names.short_names.iter().flatten().count(), 0);
        let (theirs, ours) = (paths(&versions(&upstream)[version]), schema_paths(&crd));
        added.extend(ours.keys().filter(|path| !theirs.contains_key(*path)).cloned());
        for (path, their) in theirs {
            if !path.starts_with(".spec") && !path.starts_with(".status") {
                continue;
            }
            let our = ours
                .get(&path)
                .unwrap_or_else(|| panic!("{version}: {path} is missing"));
            for keyword in KEYWORDS {
                let (their, our) = (&their[keyword], &our[keyword]);
                if keyword == "default" && !their.is_null() {
                    defaults.insert(path.clone());
                    continue;
                }
                let same = their.is_null()
                    || equal(their, our)
                    || (keyword == "enum" && sorted(their) == sorted(our));
                assert!(same, "{version}: {path} has {keyword} {our}, upstream {their}");
            }
            assert_eq!(
                sorted(&their["required"]),
                sorted(&our["required"]),
                "{version}: {path}"
            );
        }
    }
    assert_eq!(added, ADDITIONS.map(str::to_owned).into());
    assert_eq!(defaults, DEFAULTS.map(str::to_owned).into());
}

#[test]
fn every_spec_list_map_and_string_has_a_maximum() {
    let mut without = BTreeSet::new();
    for (_, crd) in both() {
        let all = schema_paths(&crd);
        for (path, node) in all.iter().filter(|(path, _)| path.starts_with(".spec")) {
            let is_map = all.contains_key(&format!("{path}{{}}"));
            if !has_maximum(node, is_map) {
                without.insert(path.clone());
            }
        }
    }
    let known = RAW.iter().chain(&LIMITED_BY_RULES).map(|path| (*path).to_owned());
    assert_eq!(without, known.collect());
}
