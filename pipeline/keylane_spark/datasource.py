"""The data source `keylane`, as Spark sees it: a topic to read from and to write to.

spark.read.format("keylane").option("subscribe", "orders").load()
"""

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from keylane.errors import InvalidArgument
from keylane_spark.plain_errors import plainly
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.schema import columns_for


class KeylaneSource(DataSource):
    """Found by Spark without registration, through the module pyspark_keylane."""

    @classmethod
    def name(cls) -> str:
        """What to pass to format()."""
        return "keylane"

    @plainly
    def schema(self) -> StructType:
        """The columns that the options ask for; the options are checked here, before anything runs."""
        return columns_for(ReadOptions.parse(self.options, streaming=None))

    # What each of these needs is imported where it is needed: they run in processes of their own.

    @plainly
    def reader(self, schema: StructType) -> DataSourceReader:
        """For spark.read."""
        from keylane_spark.source.batch import BatchReader, FilteredReader
        from keylane_spark.source.pushdown import filters_come

        kind = FilteredReader if filters_come() else BatchReader
        return kind(ReadOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For spark.readStream."""
        from keylane_spark.source.journal_stream import JournalStreamReader
        from keylane_spark.source.stream import Refused, StreamReader

        try:
            options = ReadOptions.parse(self.options, streaming=True)
            return (JournalStreamReader if options.journal else StreamReader)(options, schema)
        except InvalidArgument as error:
            return Refused(error)

    @plainly
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For df.write."""
        from keylane_spark.sink.writer import batch_writer

        _refuse(overwrite, "mode('append')")
        return batch_writer(self.options, schema)

    @plainly
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """For df.writeStream."""
        from keylane_spark.sink.writer import stream_writer

        _refuse(overwrite, "outputMode('append'), or foreachBatch, with a column `uid`, for what changes")
        return stream_writer(self.options, schema)


def _refuse(overwrite: bool, instead: str) -> None:
    if overwrite:
        raise InvalidArgument(f"a topic cannot be overwritten, only added to: use {instead}")
