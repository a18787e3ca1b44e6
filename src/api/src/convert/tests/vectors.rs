//! Comparison with the results of upstream's converter.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// Ours loses no condition: others than PreRecreateGrace are kept in an annotation.
const CONDITIONS: [usize; 10] = [3, 18, 25, 27, 29, 69, 89, 154, 174, 183];
/// Ours does not lose `mode` of pull secrets: it is kept in an annotation.
const SECRET_MODES: [usize; 7] = [33, 39, 42, 108, 129, 157, 185];
/// Upstream writes `[]` if there are no container statuses, which means the same as no annotation.
const NO_STATUSES: [usize; 6] = [27, 63, 64, 88, 89, 113];

const FAILED_IMAGES: &str = "/status/failedImageStatuses";
/// Upstream drops invalid statuses from the list of failed images. No API server accepts such a list, so conversion
/// need not repair it.
const NULLS: [usize; 17] = [
    189, 191, 197, 199, 201, 202, 207, 220, 223, 225, 226, 227, 232, 234, 238, 245, 246,
];

/// The cases of a file, in its order.
pub(in crate::convert) fn read_cases(file: &str) -> Vec<Value> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/conversion");
    let text = std::fs::read_to_string(format!("{folder}/{file}.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Number of cases of each kind and direction.
pub(in crate::convert) fn count_by_conversion(cases: &[Value]) -> Vec<(String, usize)> {
    let string_field = |case: &Value, field: &str| case[field].as_str().unwrap().to_owned();
    let mut counts = BTreeMap::<String, usize>::new();
    for case in cases {
        let conversion = ["kind", "from", "to"]
            .map(|field| string_field(case, field))
            .join(" ");
        *counts.entry(conversion).or_default() += 1;
    }
    counts.into_iter().collect()
}

/// Lines, from 1, on which ours differs on purpose, by reason.
#[derive(Default)]
pub(in crate::convert) struct KnownDifferences {
    line: usize,
    found: BTreeMap<&'static str, BTreeSet<usize>>,
}

impl KnownDifferences {
    /// Sets the line of the following differences.
    pub(in crate::convert) fn set_line(&mut self, line: usize) {
        self.line = line;
    }

    /// Removes a difference, and records the line if there was one.
    pub(in crate::convert) fn remove(
        &mut self,
        why: &'static str,
        object: &mut Value,
        remove_difference: impl FnOnce(&mut Value),
    ) {
        let before = without_empty(&without_zero(object));
        remove_difference(object);
        if without_empty(&without_zero(object)) != before {
            self.found.entry(why).or_default().insert(self.line);
        }
    }

    /// Asserts that the differences are on exactly these lines, each for its reason.
    pub(in crate::convert) fn assert_lines<const N: usize>(&self, named: [(&'static str, &[usize]); N]) {
        let named = named.map(|(why, lines)| (why, lines.iter().copied().collect()));
        assert_eq!(self.found, BTreeMap::from(named));
    }
}

pub(in crate::convert) fn versioned(object: &Value, case: &Value, version: &Value) -> Value {
    let mut object = object.clone();
    object["kind"] = case["kind"].clone();
    object["apiVersion"] = json!(format!("{GROUP}/{}", version.as_str().unwrap()));
    object
}

#[test]
fn conversions_match_upstream() {
    let cases = read_cases("upstream");
    let mut differences = KnownDifferences::default();
    for (at, case) in cases.iter().enumerate() {
        differences.set_line(at + 1);
        let object = versioned(&case["in"], case, &case["from"]);
        let converted = convert(object.clone(), case["to"].as_str().unwrap()).unwrap();
        let back = convert(converted.clone(), case["from"].as_str().unwrap()).unwrap();
        assert_eq!(
            normalized(back),
            normalized(object),
            "there and back: line {}",
            at + 1
        );

        let (mut ours, mut theirs) = (converted, versioned(&case["out"], case, &case["to"]));
        for key in [keys::CRR_CONDITIONS, keys::NODE_IMAGE_SECRET_MODES] {
            differences.remove(key, &mut ours, |ours| drop(remove_annotation(ours, key)));
        }
        let key = keys::CRR_SYNC_CONTAINER_STATUSES;
        differences.remove(key, &mut theirs, |theirs| {
            if annotation(theirs, key) == Some("[]") {
                remove_annotation(theirs, key);
            }
        });
        differences.remove(FAILED_IMAGES, &mut ours, |ours| {
            if let Some(failed) = ours.pointer_mut(FAILED_IMAGES).and_then(Value::as_array_mut) {
                failed.retain(|one| !one.is_null());
            }
        });
        assert_eq!(without_empty(&ours), without_empty(&theirs), "line {}", at + 1);
    }
    differences.assert_lines([
        (keys::CRR_CONDITIONS, &CONDITIONS),
        (keys::NODE_IMAGE_SECRET_MODES, &SECRET_MODES),
        (keys::CRR_SYNC_CONTAINER_STATUSES, &NO_STATUSES),
        (FAILED_IMAGES, &NULLS),
    ]);
    let ways = [
        ("ContainerRecreateRequest v1alpha1 v1beta1", 39),
        ("ContainerRecreateRequest v1beta1 v1alpha1", 28),
        ("ImageListPullJob v1alpha1 v1beta1", 35),
        ("ImageListPullJob v1beta1 v1alpha1", 28),
        ("ImagePullJob v1alpha1 v1beta1", 24),
        ("ImagePullJob v1beta1 v1alpha1", 31),
        ("NodeImage v1alpha1 v1beta1", 31),
        ("NodeImage v1beta1 v1alpha1", 33),
    ];
    assert_eq!(
        count_by_conversion(&cases),
        ways.map(|(way, count)| (way.to_owned(), count))
    );
}

/// Objects as upstream's clients write them pass through our types without loss.
#[test]
fn our_types_round_trip_upstream_objects() {
    use crate::{
        container_recreate_request as crr, image_list_pull_job as list_job, image_pull_job as job,
        node_image as image, v1alpha1,
    };
    for case in &read_cases("upstream") {
        for (object, version) in [(&case["in"], &case["from"]), (&case["out"], &case["to"])] {
            let mut object = versioned(object, case, version);
            // The API server refuses null where the schema requires a list or an object; the random objects have it.
            for (map, list) in [("/spec/images", "tags"), ("/status/imageStatuses", "tags")] {
                let values = object.pointer_mut(map).and_then(Value::as_object_mut);
                for value in values
                    .into_iter()
                    .flat_map(|all| all.values_mut())
                    .filter(|one| one[list].is_null())
                {
                    value[list] = json!([]);
                }
            }
            for path in ["/spec/containers", "/spec/images"] {
                if let Some(list @ Value::Null) = object.pointer_mut(path) {
                    *list = json!([]);
                }
            }
            if let Some(failed) = object.pointer_mut(FAILED_IMAGES).and_then(Value::as_array_mut) {
                failed.retain(|one| !one.is_null());
            }
            let back = match (object["kind"].as_str().unwrap(), version.as_str().unwrap()) {
                ("NodeImage", V1BETA1) => round_trip::<image::NodeImage>(&object),
                ("NodeImage", _) => round_trip::<v1alpha1::NodeImage>(&object),
                ("ImagePullJob", V1BETA1) => round_trip::<job::ImagePullJob>(&object),
                ("ImagePullJob", _) => round_trip::<v1alpha1::ImagePullJob>(&object),
                ("ImageListPullJob", V1BETA1) => round_trip::<list_job::ImageListPullJob>(&object),
                ("ImageListPullJob", _) => round_trip::<v1alpha1::ImageListPullJob>(&object),
                (_, V1BETA1) => round_trip::<crr::ContainerRecreateRequest>(&object),
                _ => round_trip::<v1alpha1::ContainerRecreateRequest>(&object),
            };
            assert_eq!(back, without_empty(&without_zero(&object)), "{version} of {case}");
        }
    }
}
